"""The emoji data set, and what is trained on its images one token at a time."""
