"""The steps of a training that were kept, and who may know of them."""
