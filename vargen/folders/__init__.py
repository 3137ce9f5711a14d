"""Reading model folders as data: JSON, networks and tokenizers, validated before transformers or diffusers see them."""
