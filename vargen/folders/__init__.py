"""Reading model folders as data: JSON, networks, tokenizers and processors, checked before transformers or diffusers see them."""
