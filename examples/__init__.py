"""A whole run of the service, an independent measurement of an adapter, and the algorithm on one screen."""
