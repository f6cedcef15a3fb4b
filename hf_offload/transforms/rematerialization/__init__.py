"""Saving less for backward where what autograd saves can be recomputed from what is saved anyway."""
