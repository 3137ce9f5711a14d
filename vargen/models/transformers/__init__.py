"""Image language models of transformers, described: prompts to tokens, embeddings, output heads, tokens to images."""
