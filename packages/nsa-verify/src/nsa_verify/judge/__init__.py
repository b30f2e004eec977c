"""The verdict: is a tensor, a selection, a slot or a layer's gradient right?"""
