"""Planning: load the installed backends, ask them, choose one per slot, and warm the plan up."""
