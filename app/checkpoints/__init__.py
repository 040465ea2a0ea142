"""The ends of a training's epochs: listed, downloaded, deleted, and who may know of them."""
