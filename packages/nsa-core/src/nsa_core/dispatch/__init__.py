"""From installed plugins to a plan: loading, probing, choosing, warming up."""
