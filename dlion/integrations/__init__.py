"""Thin adapters to what people already use; each is imported only when it is asked for."""
