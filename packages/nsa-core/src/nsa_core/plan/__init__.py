"""Dispatch: load the installed backends, probe them, choose one per slot, and warm the plan up."""
