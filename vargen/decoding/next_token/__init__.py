"""Next-token models: a drafter proposes tokens, one pass of the model verifies them, an acceptance rule decides."""
