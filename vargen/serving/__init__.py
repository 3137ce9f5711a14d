"""The service: one process that generates for many clients at once, behind OpenAI's HTTP interface."""
