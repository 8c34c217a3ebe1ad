"""Values that tasks, the coordinator and the graph share: ids, stream elements, failure reasons."""
