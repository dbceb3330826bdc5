"""How is the service placed, started, watched and stopped?"""
