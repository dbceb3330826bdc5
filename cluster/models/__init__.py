"""Which models does a configuration name, and how do they get onto this machine?"""
