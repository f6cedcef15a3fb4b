"""Linear layers whose weight gradient is estimated from a part of their input."""
