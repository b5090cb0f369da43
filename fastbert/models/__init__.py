"""Adapters: transformers' classes with the inside of their forward replaced."""
