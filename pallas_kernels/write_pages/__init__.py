from pallas_kernels.write_pages.api import write_pages as write_pages
