"""Long jobs of a store on many hosts: checks and exports as tasks of an executor."""
