"""The labs, the bench and the attacks: the research on SPARD, which serving does not need."""
