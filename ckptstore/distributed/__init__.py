"""How do many ranks commit and restore one state?"""
