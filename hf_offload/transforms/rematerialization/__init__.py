"""Saving less for backward where what autograd saves can be made again from what is saved anyway."""
