"""The vargen command, a file per verb."""
