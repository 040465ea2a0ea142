"""The lab, the bench and the attacks: what research needs and serving does not."""
