"""Quality of images and videos: resumable runs, features, metrics, scores, reports."""
