"""Tiers: a store on a fast disk, and a mirror that receives its commits."""
