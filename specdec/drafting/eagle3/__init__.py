"""EAGLE-3: how does a layer draft that reads three of the target's hidden states, and the tokens of its own draft?"""
