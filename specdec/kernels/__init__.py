"""How are attention and recurrent scans computed?"""
