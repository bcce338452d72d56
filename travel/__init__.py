"""The travel world: TravelPlanner's tasks, its checks, an exact solver, a teacher."""
