"""Serving: who may ask which model, what a request costs, and the engines that write the replies."""
