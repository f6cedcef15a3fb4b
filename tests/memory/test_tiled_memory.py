"""What tiling is for: less memory at the loss and in MLPs."""
