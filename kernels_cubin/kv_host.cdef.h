/* The host build of the kernels, as kv_host.h exports it. */
typedef struct { unsigned long long begin, end; } kv_range;
typedef struct { unsigned long long address, nbytes; unsigned int is_write, happened; } kv_fault;
unsigned int kv_host_abi(void);
int kv_host_find(const char *name);
int kv_host_launch(int kernel, unsigned int ctas, const void *args, const kv_range *ranges, unsigned int n_ranges,
                   kv_fault *fault);
