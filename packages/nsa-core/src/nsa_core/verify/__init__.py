"""Is it right? The verdict, the second oracle, and the judges of slots and of selections."""
