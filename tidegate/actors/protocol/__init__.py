"""Values that tasks, coordinator and graph share: ids, stream elements, reasons of failure."""
