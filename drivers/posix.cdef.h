/* Memory calls of the C library that kvferry makes itself: they release the interpreter while they work. */
#define PROT_READ 1
#define PROT_WRITE 2
#define MAP_SHARED 1
#define MAP_PRIVATE 2
#define MAP_FIXED 16
#define MAP_ANONYMOUS 32
#define MADV_DONTFORK 10
#define MADV_HUGEPAGE 14
#define MADV_POPULATE_WRITE 23
#define MREMAP_MAYMOVE 1
#define MFD_CLOEXEC 1

void *mmap(void *address, size_t length, int protection, int flags, int fd, long offset);
int munmap(void *address, size_t length);
int madvise(void *address, size_t length, int advice);
void *mremap(void *old_address, size_t old_size, size_t new_size, int flags, ...);
int memfd_create(const char *name, unsigned int flags);
void *memset(void *dst, int value, size_t nbytes);
void *memmove(void *dst, const void *src, size_t nbytes);
int memcmp(const void *a, const void *b, size_t nbytes);
