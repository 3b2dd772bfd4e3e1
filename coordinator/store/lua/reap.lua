-- ARGV: holder, stale_record_kept_ms. Returns {request id, epoch, gateway id} of each request that was ended.
local ended = {}
-- A call that waited here while Redis stood still comes from before: nobody had the time to say that he lives.
if redis.call('GET', key('leader')) ~= ARGV[1] then return ended end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('leases'), '-inf', NOW_MS, 'LIMIT', 0, 1000)) do
  local request = read(key('req:', id))
  if request.state and not ENDS[request.state] then
    enter(id, request, 'FAILED', request.epoch)
    redis.call('HSET', key('req:', id), 'reaped', '1')
    count('reaped')
    ended[#ended + 1] = {id, tonumber(request.epoch), request.gateway}
  end
  redis.call('ZREM', key('leases'), id)
end
-- Who lives beats each second, and so is not among these.
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('touched'), '-inf', NOW_US - 1000000, 'LIMIT', 0, 1000)) do
  local node = key('node:', id)
  local known = redis.call('HMGET', node, 'until', 'died')
  if not known[1] then
    if tonumber(redis.call('ZSCORE', key('touched'), id)) + ARGV[2] * 1000 <= NOW_US then
      redis.call('ZREM', key('touched'), id)
    end
  elseif not known[2] and tonumber(known[1]) <= NOW_MS then
    redis.call('HSET', node, 'term', '0', 'died', NOW_MS, 'pending', 0, 'prefills', 0, 'reserved', 0,
      'decodes', 0, 'answers', 0)
    count('buried')
  elseif known[2] and tonumber(known[2]) + ARGV[2] <= NOW_MS then
    redis.call('DEL', node)
    redis.call('ZREM', key('nodes'), id)
  end
end
return ended
