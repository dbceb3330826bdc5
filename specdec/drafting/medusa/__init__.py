"""Medusa: how do layers on the target's last hidden state draft, each for a place of its own?"""
