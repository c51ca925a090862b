"""Token ids in, token ids and logprobs out. An engine knows no text, no tools and no rewards."""
