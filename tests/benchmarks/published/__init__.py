"""Training runs whose speed was published, built anew from their scripts."""
