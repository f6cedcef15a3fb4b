"""Adapters on frozen weights, made by peft: LoRA, DoRA and LoRA-FA, and QLoRA on weights in 4 bits."""
