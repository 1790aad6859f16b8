"""Placement rules: where decoding sequences get their next tokens, step by step, without the policy being asked."""
