"""Next-scale models: a schedule says which model generates which scales, and how guided."""
