"""Models that answer: who may ask which, at what cost, and the engines that write the replies."""
