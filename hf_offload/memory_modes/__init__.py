"""What is trained, and what the optimizer keeps of it: a word for each way."""
