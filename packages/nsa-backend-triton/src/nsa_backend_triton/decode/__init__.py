"""The decode forms of every slot, and the fused ones."""
