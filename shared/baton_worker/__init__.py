"""What prefill and decode share outside the scheduler, without torch: HTTP app, tokenizer, schemas, supervision of ranks."""
