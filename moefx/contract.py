"""Contracts: what a kernel needs, as sympy predicates over named dims, and what is known of them (design section 1.2)."""
