"""The net over the whole: properties that draw from one registry of what a store can do."""
