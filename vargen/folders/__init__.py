"""Reading model folders as data: JSON, networks, tokenizers, processors, checked before transformers or diffusers see them."""
