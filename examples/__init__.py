"""A whole run of the service, an adapter measured as a customer would, and the algorithm on one screen."""
