"""Reading model folders as data: JSON, weights, networks and tokenizers that are checked before a library sees them."""
