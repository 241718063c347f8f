// Loads plugins with their names visible to each other, and runs them all at once, several times.
#include <cstdio>
#include <thread>
#include <vector>

#include <dlfcn.h>

int main(int argc, char** argv) {
  std::vector<int (*)(int)> runs;
  for (int i = 1; i < argc; ++i) {
    void* const plugin = dlopen(argv[i], RTLD_NOW | RTLD_GLOBAL);
    if (plugin == nullptr) {
      std::fprintf(stderr, "%s\n", dlerror());
      return 1;
    }
    const auto version = reinterpret_cast<const char* (*)()>(dlsym(plugin, "plugin_version"));
    runs.push_back(reinterpret_cast<int (*)(int)>(dlsym(plugin, "plugin_run")));
    std::printf("%s\n", version());
  }
  std::vector<int> failures(runs.size(), 0);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < runs.size(); ++i)
    threads.emplace_back([&, i] {
      for (int round = 0; round < 20; ++round)
        failures[i] += runs[i](100 * static_cast<int>(i) + round);
    });
  for (std::thread& thread : threads)
    thread.join();
  for (const int failed : failures)
    if (failed != 0) return 1;
  std::puts("all plugins are right");
}
