"""What does an operator see and change in a running service?"""
