from pallas_kernels.top_k_pages.api import top_k_pages as top_k_pages
